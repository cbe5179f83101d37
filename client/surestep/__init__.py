"""What programs import that use Surestep; the services are packages of their own."""
