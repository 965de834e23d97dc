"""Evidence for the certificate: a search for violations, shares certified, trained heads."""
