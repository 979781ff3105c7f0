"""The lock of torch's global generator on the CPU, which all rooms use."""

import threading

# To take around every call that reads, sets or seeds the generator. torch holds the generator's mutex while
# it makes the tensor of a state, in which Python's garbage collector may hand the interpreter to a thread
# that waits for the mutex: both would wait for ever. A thread waits for this lock without the interpreter.
TORCH_GENERATOR = threading.Lock()
