"""The gRPC service Scheduler."""
