"""Arrays of uint8 images in ADM's file format (arXiv 2105.05233)."""
