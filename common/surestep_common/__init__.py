"""Code that all processes share. Import it before gRPC, which reads its environment only then."""

import os

# gRPC prepares for forks, of which all of ours end in an exec. Where a call is under way at that
# moment it prepares half, and the child ends by SIGSEGV (seen with grpcio 1.85, twice in 80).
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
