"""What tests share: stand-ins, checkpoints, processes, cases, and the oracles they are held against."""
