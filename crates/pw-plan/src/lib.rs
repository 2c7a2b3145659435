//! Pure planning: shard maps from shardings.
