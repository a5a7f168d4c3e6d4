"""Find by experiment how an operator without a sharding rule can be split."""
