"""`python -m streamkv` is the same as `streamkv`."""

from streamkv.cli import main

raise SystemExit(main())
