"""What must be set before torch is imported anywhere in the test run, and how hypothesis searches."""

import os

from hypothesis import settings

# libgomp's threads spin for milliseconds between two small operators; with more busy processes than cores, as in a
# test run on two of them, each parallel region then waits for a descheduled thread. The engine sets the same.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# CI judges the change, by the same examples each time; people's machines look for new ones.
# No deadline: speed is not what these tests are about.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
