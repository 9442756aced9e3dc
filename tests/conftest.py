"""Jobs that tests start print as a user's do: into a file or a pipe, Python keeps back what it prints until there is more."""

import os

os.environ.pop("PYTHONUNBUFFERED", None)
