"""What may be proved about attention with a stabilizer fixed before the KV loop."""

from certify.arithmetic import DEFAULT_TOLERANCE
from certify.bounds import BOUND_NAMES
from certify.certificate import Certificate, certify
from certify.theorem import VERDICTS

__all__ = ["BOUND_NAMES", "DEFAULT_TOLERANCE", "VERDICTS", "Certificate", "certify"]
