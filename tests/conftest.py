"""What must be set before torch is imported anywhere in the test run."""

import os

# libgomp's threads spin for milliseconds between two small operators; with more busy processes than cores, as in a
# test run on two of them, each parallel region then waits for a descheduled thread. The engine sets the same.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
