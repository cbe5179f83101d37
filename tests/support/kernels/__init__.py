"""Cases of the kernel tests, and Triton's interpreter and compiler."""
