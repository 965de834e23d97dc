"""What may be proved about attention with a stabilizer fixed before the KV loop."""

from certify.arithmetic import DEFAULT_TOLERANCE
from certify.bounds import BOUND_NAMES
from certify.call import certify, record
from certify.certificate import Certificate
from certify.rows import RECORD_FIELDS
from certify.theorem import VERDICTS

__all__ = [
    "BOUND_NAMES",
    "DEFAULT_TOLERANCE",
    "RECORD_FIELDS",
    "VERDICTS",
    "Certificate",
    "certify",
    "record",
]
