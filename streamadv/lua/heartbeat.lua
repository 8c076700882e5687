-- A producer says that it is alive, finished or gone; entries silent for an hour are forgotten.
-- KEYS  void, producers, trainer
-- ARGV  producer, 'open', 'finished' or 'gone'
-- Returns  {version or nil, drop_after or nil} of the trainer
-- include clock
redis.call('DEL', KEYS[1])
local now = now_ms()
if ARGV[2] == 'gone' then
  redis.call('HDEL', KEYS[2], ARGV[1])
else
  redis.call('HSET', KEYS[2], ARGV[1], string.format('%.17g', now) .. ' ' .. ARGV[2])
end
local flat = redis.call('HGETALL', KEYS[2])
for i = 1, #flat, 2 do
  local seen, state = string.match(flat[i + 1], '^(%d+) (%a+)$')
  if state == 'open' and now - tonumber(seen) > 3600000 then redis.call('HDEL', KEYS[2], flat[i]) end
end
return redis.call('HMGET', KEYS[3], 'version', 'drop_after')
