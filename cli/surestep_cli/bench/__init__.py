"""`surestep bench`: the load generator and its report."""
