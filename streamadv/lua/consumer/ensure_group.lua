-- Create a consumer group that reads its stream from the beginning; existing ones stay as they are.
-- KEYS  void, stream
-- ARGV  consumer group
-- Returns  1 when created, 0 when it was there
redis.call('DEL', KEYS[1])
if redis.call('EXISTS', KEYS[2]) == 1 then
  for _, info in ipairs(redis.call('XINFO', 'GROUPS', KEYS[2])) do
    for i = 1, #info, 2 do
      if info[i] == 'name' and info[i + 1] == ARGV[1] then return 0 end
    end
  end
end
redis.call('XGROUP', 'CREATE', KEYS[2], ARGV[1], '0', 'MKSTREAM')
return 1
