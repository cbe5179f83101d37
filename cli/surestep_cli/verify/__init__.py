"""`surestep verify`: the cases, the faults, the comparison and its report."""
