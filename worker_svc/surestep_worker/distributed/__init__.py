"""Groups of ranks: collectives, rendezvous, and peer memory."""
