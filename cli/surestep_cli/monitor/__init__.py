"""`surestep status` and `surestep top`."""
