"""One module for the commands of one kind: options in, a call of the library, a table or JSON out."""
