"""`python -m surestep.entrypoints.openai.api_server --model MODEL ...` is `surestep serve ...`."""

import sys

from surestep_cli.main import run

if __name__ == "__main__":
    raise SystemExit(run(["serve", *sys.argv[1:]]))
