"""The pictures of the book, one file a chapter. A chapter calls them by name: `from minillm.figures import ch00`."""
