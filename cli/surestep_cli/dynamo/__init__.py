"""`surestep dynamo`: a worker of NVIDIA Dynamo in front of a scheduler."""
