"""`python -m nanoinfer`: the command."""

import sys

from nanoinfer.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
