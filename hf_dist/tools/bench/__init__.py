"""The same training under several engines, compared: `hf-dist bench`. See README.md in this folder."""
