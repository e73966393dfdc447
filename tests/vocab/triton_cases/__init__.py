"""Tests of the Triton kernels that run in two ways: under Triton's interpreter, in processes of their own with
TRITON_INTERPRET=1 (test_triton_interpreter.py, test_triton_interpreter_losses.py), and on a card (test_triton_gpu.py)."""
