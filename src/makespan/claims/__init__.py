"""The ledger: statements, and whether the results of the sources bear them out."""
