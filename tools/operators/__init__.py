"""The rules for operators put to the proof, and the page that lists them."""
