"""Many models, one table: lists of targets, one function from a target to rows, engines that run it, the table itself."""
