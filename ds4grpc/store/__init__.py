"""Bank files and the catalog that indexes them."""
