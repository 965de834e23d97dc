"""What may be proved about attention with a stabilizer fixed before the KV loop."""

from certify.arithmetic import DEFAULT_TOLERANCE
from certify.bounds import BOUND_NAMES
from certify.call import certify, record
from certify.certificate import Certificate
from certify.rows import RECORD_FIELDS
from certify.static import StaticCertificate, static_certificates
from certify.theorem import CERTIFICATE_FIELDS, VERDICTS

__all__ = [
    "BOUND_NAMES",
    "CERTIFICATE_FIELDS",
    "DEFAULT_TOLERANCE",
    "RECORD_FIELDS",
    "VERDICTS",
    "Certificate",
    "StaticCertificate",
    "certify",
    "record",
    "static_certificates",
]
