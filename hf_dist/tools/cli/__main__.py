"""`python -m hf_dist.tools.cli` is `hf-dist`."""

from hf_dist.tools.cli import main

if __name__ == "__main__":
    main()
