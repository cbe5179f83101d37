"""Parts of the product written down a second time, plainly."""
