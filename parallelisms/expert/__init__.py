"""Expert parallelism: dispatch, combine and expert meshes."""
