-- A producer says that it is alive, finished or gone. Who is gone is taken off the list by rank 0.
-- KEYS  void, producers, trainer
-- ARGV  producer, 'open', 'finished' or 'gone'
-- Returns  {version or nil, drop_after or nil} of the trainer
-- include clock
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[2], ARGV[1], string.format('%.17g', now_ms()) .. ' ' .. ARGV[2])
return redis.call('HMGET', KEYS[3], 'version', 'drop_after')
