"""Stand-ins: a scheduler, a worker, an engine, a rank or a service without a model."""
