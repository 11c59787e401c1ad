"""The harnesses that rolltap can launch: a file each, their installation, and environments of other packages."""
