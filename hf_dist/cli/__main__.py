"""`python -m hf_dist.cli` is `hf-dist`."""

from hf_dist.cli import main

if __name__ == "__main__":
    main()
