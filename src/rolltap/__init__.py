"""rolltap: point any agent at a URL; train on exactly the tokens it sampled.

The kernel of the product lives here (types, errors, settings, the call log, the ledger, the embedded engine, the
command line). The folders that stand at the top of the repository (`proxy`, `reconstructor`, `trainer_client`,
`harnesses`) are sub-packages of this one by symbolic link.
"""

__version__ = "0.1.0"
