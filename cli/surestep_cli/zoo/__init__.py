"""`surestep zoo`: published failures of serving engines, as requests to any server."""
