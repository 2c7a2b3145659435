//! The controller's core: sessions, compile table, graph, order, directory, memory, membership. Pure.
