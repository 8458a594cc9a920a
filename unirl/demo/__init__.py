"""The demos: small models that learn on a laptop, and the command that shows them learn."""
