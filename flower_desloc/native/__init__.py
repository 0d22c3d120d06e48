"""What is faster than PyTorch's operations on the CPU: a few lines of C, and large pages.

There a pass over memory costs what its traffic costs, and PyTorch's operations make several where
one would do. With a C compiler on the machine (``CC``, or ``cc``, ``gcc``, ``clang``) it is one;
without, it is PyTorch's operations. Products and sums are rounded one by one (no fused
multiply-add), so that the result is the same bits whatever the width of vectors.
"""
