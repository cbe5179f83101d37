"""The one path on which SageMaker sends requests of any kind."""
