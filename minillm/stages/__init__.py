"""The ladder: one module a chapter, in chapter order. A stage imports only from earlier ones and from the package's core."""
