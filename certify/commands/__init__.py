"""The sub-commands of ``certify``, one module each."""
