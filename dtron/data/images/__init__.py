"""Text with images: rows of JSONL files, and the images of packed sequences."""
