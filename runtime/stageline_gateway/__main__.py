"""`python -m stageline_gateway`: the command without the rest of the command line."""

import sys

from stageline_api.errors import UserError
from stageline_gateway.command import gateway

try:
    gateway(prog_name="stageline gateway")
except UserError as error:
    sys.stderr.write(f"Error: {error.message}\n")
    sys.exit(error.exit_code)
