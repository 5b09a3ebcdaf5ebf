"""Expert parallelism: expert meshes, dispatch and combine of tokens."""
