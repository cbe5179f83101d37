"""Package that programs import to use Surestep; the services are packages of their own."""
