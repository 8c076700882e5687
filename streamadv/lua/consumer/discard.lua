-- Finish a work item without a result, because its batch no longer exists.
-- KEYS  void, work
-- ARGV  consumer group, entry id, text of the item
-- Returns  1, or 0 when somebody else has finished it
-- include other_work
if is_other_work(ARGV[2], ARGV[3]) then return 0 end
if redis.call('XACK', keys.work, ARGV[1], ARGV[2]) == 0 then return 0 end
return redis.call('XDEL', keys.work, ARGV[2])
