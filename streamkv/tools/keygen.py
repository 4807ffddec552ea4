"""`streamkv keygen FILE`: a CURVE key pair for an engine or a gateway that talk over tcp between machines."""

import argparse
import sys
from pathlib import Path

from streamkv.config import exit_with
from streamkv.errors import ConfigError
from streamkv.transport import write_curve_keys


def main() -> int:
    """Write the secret key, print the public one."""
    parser = argparse.ArgumentParser(
        prog="streamkv keygen",
        description="Makes a key pair for one process. The secret key goes to FILE, which only you can read and which "
        "must not exist yet; the public key is printed. Give FILE to that process as --curve-secret-key-file, and the "
        "engine's public key to each gateway as --curve-server-key.",
    )
    parser.add_argument("file", metavar="FILE", type=Path)
    try:
        public = write_curve_keys(parser.parse_args().file)
    except ConfigError as error:
        exit_with(error)
    print(public.decode("ascii"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
