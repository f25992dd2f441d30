"""What parts of a model are worth: its loss, what removing a part costs, and smaller models without what costs least."""
