-- Note in an open group what its rollouts share and their keys leave out, for whoever ends them.
-- KEYS  group
-- ARGV  JSON
-- Returns  1, or 0 when the group is not open
if redis.call('HEXISTS', keys.group, 'head') == 0 then return 0 end
redis.call('HSET', keys.group, 'shared', ARGV[1])
return 1
